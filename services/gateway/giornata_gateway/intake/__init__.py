"""What a request passes before it becomes a job: keys, quotas, memory for pictures, and the gateway's departure."""
