# The control plane: `planish serve` and the other commands, without torch and without Ray.
# Build it from the repository's root, see deploy/README.md.
ARG BASE=python:3.12-slim

FROM ${BASE} AS packages
# A package that has no wheel is built here; the compiler stays behind in this stage.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/planish
WORKDIR /build
COPY deploy/docker/build.lock deploy/docker/service.lock ./
# Everything by hash, what builds as well, so that no index can slip in another file. An index of your
# own and its certificate come as secrets, which no layer keeps.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca \
    /opt/planish/bin/pip install --require-hashes --requirement build.lock \
    && /opt/planish/bin/pip install --require-hashes --no-build-isolation --requirement service.lock

# Planish itself is apart from its packages: a new version of it is a layer of three megabytes.
FROM packages AS build
COPY . source/
RUN /opt/planish/bin/pip install --no-build-isolation --no-deps --prefix=/opt/code ./source

FROM packages AS runtime
RUN /opt/planish/bin/pip uninstall --yes setuptools pip

FROM ${BASE}
LABEL org.opencontainers.image.title="Planish" \
      org.opencontainers.image.description="Control plane of a post-training service for LLMs" \
      org.opencontainers.image.licenses="Apache-2.0"
# Debian packages that a launcher calls, such as `slurm-client`.
ARG DEBIAN_PACKAGES=""
RUN if [ -n "${DEBIAN_PACKAGES}" ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends ${DEBIAN_PACKAGES} \
        && apt-get clean && rm -rf /var/lib/apt/lists/*; \
    fi
# A number that volumes can be given to; `runAsNonRoot` can only check a number.
RUN groupadd --gid 10001 planish \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin planish \
    && install --directory --owner 10001 --group 10001 --mode 0700 /data
COPY --from=runtime /opt/planish /opt/planish
COPY --from=build /opt/code /opt/planish
COPY deploy/docker/healthcheck.py /opt/planish/healthcheck.py
# HOME: libraries keep caches there, and with a read-only root only /tmp and /data can be written to.
ENV PATH="/opt/planish/bin:${PATH}" \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
# Patient: a busy machine is no reason to restart a service.
HEALTHCHECK --interval=15s --timeout=30s --start-period=60s --retries=3 \
    CMD ["python", "-I", "/opt/planish/healthcheck.py"]
# `planish` answers SIGTERM itself, as process 1 too.
ENTRYPOINT ["planish"]
CMD ["serve", "--data-dir", "/data", "--host", "0.0.0.0", "--no-save-connection"]
