"""What a request passes before it becomes a job: keys, limits, quotas, and the gateway's departure."""
