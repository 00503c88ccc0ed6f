"""What a job record becomes, and when jobs end. Pure."""
