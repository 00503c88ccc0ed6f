"""Records in JetStream's key-value buckets: jobs, registered templates, jobs that were given up."""
