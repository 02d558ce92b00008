"""One small module per driver: run one statement on one connection, and name its errors in our words."""
