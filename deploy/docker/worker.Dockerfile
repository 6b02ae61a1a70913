# The workers: drivers, Ray's head and worker nodes, ranks. NVIDIA's image brings torch, Transformer
# Engine, NCCL and CUDA as NVIDIA built them together; the rest comes from worker.lock, into an
# environment of its own that sees the base's packages and leaves each of them as it is.
# Build it from the repository's root, see deploy/README.md.
#
# PACKAGES=lock     installs worker.lock: for clusters.
# PACKAGES=mounted  installs no package but Planish: at run time /opt/packages holds the others (the
#                   site-packages of an environment of the same Python). For tests and for work on
#                   Planish itself, where a base without CUDA serves.
ARG BASE=nvcr.io/nvidia/pytorch:26.09-py3@sha256:6e8ccc607fc2a51e3741667b86316a0889418ba8b78ed0ba96e8d282b648a7a6

FROM ${BASE} AS build
ARG PACKAGES=lock
# A package that has no wheel is built here; the compiler stays behind in this stage.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# NVIDIA's image holds pip to the versions that it has itself. They stay where they are; ours go
# before them, so its constraints are none of ours. Its Python brings no ensurepip, so the base's own
# pip installs into the environment, seen from inside it.
ENV PIP_CONSTRAINT="" PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -c 'import sys; v = sys.version_info; assert v[:2] == (3, 12), f"Python 3.12 is needed: {v}"' \
    && python3 -m venv --system-site-packages --without-pip /opt/planish
WORKDIR /build
COPY deploy/docker/build.lock deploy/docker/worker.lock ./
# Everything by hash, what builds as well, so that no index can slip in another file. An index of your
# own and its certificate come as secrets, which no layer keeps.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca \
    /opt/planish/bin/python -m pip install --require-hashes --requirement build.lock
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca \
    case "${PACKAGES}" in \
        lock) /opt/planish/bin/python -m pip install --require-hashes --no-deps --no-build-isolation \
            --requirement worker.lock ;; \
        mounted) site=$(/opt/planish/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
            && echo /opt/packages > "${site}/planish-mounted.pth" \
            && printf '#!/opt/planish/bin/python\nimport sys\nfrom ray.scripts.scripts import main\nsys.exit(main())\n' \
                > /opt/planish/bin/ray \
            && chmod 0755 /opt/planish/bin/ray ;; \
        *) echo "PACKAGES must be lock or mounted; it is ${PACKAGES}" >&2; exit 2 ;; \
    esac
COPY . source/
RUN /opt/planish/bin/python -m pip install --no-build-isolation --no-deps ./source
# What nothing but running it can tell: this base's torch is one that Planish can use.
RUN [ "${PACKAGES}" = mounted ] || /opt/planish/bin/python source/deploy/docker/check_worker.py

FROM ${BASE}
LABEL org.opencontainers.image.title="Planish worker" \
      org.opencontainers.image.description="Megatron-Core and Ray for Planish's jobs" \
      org.opencontainers.image.licenses="Apache-2.0"
# wget: KubeRay's probes of some Ray versions call it. tini: reaps what Ray's processes leave behind,
# and ends a driver that has process 1's deaf ear for signals.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini wget \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
# The same number as the control plane's: both write into the jobs' folders.
RUN groupadd --gid 10001 planish \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /bin/bash planish
COPY --from=build /opt/planish /opt/planish
# HOME: Ray, torch and Triton keep caches, and with a read-only root only /tmp can be written to.
# RAY_...: a Ray node that is told to end waits 30 s for its work, and a head has three more seconds of
# waits after that. A driver ends its ranks itself; where a node has to wait for it, launchers say so.
ENV PATH="/opt/planish/bin:${PATH}" \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
USER 10001:10001
WORKDIR /tmp
# Whether a worker is well is told by Ray and by the driver's events; a cluster's own probes ask Ray.
HEALTHCHECK NONE
ENTRYPOINT ["tini", "-g", "--"]
CMD ["python", "-m", "megatron_backend", "--help"]
