"""What happens when a task runs out of device memory: it runs again, in smaller parts."""
