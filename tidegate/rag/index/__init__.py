"""Vector and keyword indexes."""
