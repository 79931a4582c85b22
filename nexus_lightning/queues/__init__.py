"""The queues: training jobs (control plane), training partitions (data plane)."""
