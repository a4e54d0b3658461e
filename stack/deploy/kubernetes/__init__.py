"""The stack as Kubernetes objects. base/*.yaml holds the objects; Python fills in what is computed or optional: rules,
monitors and dashboards (monitoring.py), running parts (running.py), network policies (policies.py), files for kustomize
(files.py). Nothing here ever connects to a cluster."""
