"""The environments of a gateway's tasks, which run in processes of their own."""
