"""A client of the openai SDK that needs less CPU time, for agents."""
