"""Deployment: compose, Prometheus, fleet, Kubernetes."""
