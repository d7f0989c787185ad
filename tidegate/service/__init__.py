"""Server processes: started, owned, announced, ended."""
