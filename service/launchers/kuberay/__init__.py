"""Jobs on Kubernetes, each attempt a RayJob that the KubeRay operator runs."""
