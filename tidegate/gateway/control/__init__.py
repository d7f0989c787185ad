"""Parts of the client of the control plane."""
