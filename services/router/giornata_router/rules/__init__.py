"""Rules of jobs: what a job record becomes, and when jobs end. Pure."""
