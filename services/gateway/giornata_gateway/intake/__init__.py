"""The intake of requests before they become jobs: keys, limits, quotas, and the gateway's departure."""
