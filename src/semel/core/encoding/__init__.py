"""What is stored and compared: snapshots, serializers, canonical JSON, fingerprints."""
