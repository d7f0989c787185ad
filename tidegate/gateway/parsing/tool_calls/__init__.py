"""Tool-call formats; `registry` lists them."""
