"""The handle that a running handler holds, and the keys it sends on."""
