"""Environments of other libraries, configured by settings alone: `env.use = "<library>:<environment>"`."""
