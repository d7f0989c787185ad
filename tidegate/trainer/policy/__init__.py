"""The policy: forward pass, loss, optimizer step."""
