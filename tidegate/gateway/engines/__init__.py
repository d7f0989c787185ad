"""Pool of inference engines: health, dispatch and protocol."""
