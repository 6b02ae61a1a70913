"""What is on each dashboard, and how Grafana reads it."""
