"""The stack as Kubernetes objects: what is watched and told (watching.py), what runs (running.py), who may speak to
whom (policies.py), and all of it as files for kustomize (files.py). Plain YAML: nothing here ever speaks to a
cluster."""
