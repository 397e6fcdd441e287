# One image a service: `docker build --target gateway .`, or all of them with `docker compose build`.
#
# Each holds Python, the packages of its own extra of pyproject.toml and of `telemetry`, and the code of its own service
# beside `shared`.
# Wheels in deploy/wheels are used before those of a package index.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG NATS_IMAGE=nats:2-alpine
ARG HAPROXY_IMAGE=haproxy:3.2-alpine

FROM scratch AS wheels
COPY deploy/wheels/ /


# What all images begin with: a user without rights, the folders that volumes are mounted on, and how to look at health.
FROM ${PYTHON_IMAGE} AS base
RUN groupadd --gid 10001 shoal \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin shoal \
    && install -d -o shoal -g shoal /var/lib/shoal /var/cache/shoal \
    && mkdir /app
ENV PATH=/opt/shoal/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    SHOAL_HOME=/var/lib/shoal \
    SHOAL_HEALTH_FILE=/tmp/healthy
WORKDIR /app
STOPSIGNAL SIGTERM


# Where packages are installed; no image is made from this, so pip is in none of the services.
FROM base AS tools
WORKDIR /build
RUN /usr/local/bin/python3 -m venv --without-pip /opt/shoal
ARG PIP_NO_INDEX=
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
COPY pyproject.toml constraints.txt deploy/docker/requirements.py deploy/docker/metadata.py deploy/docker/install.sh ./

FROM tools AS gateway-packages
RUN --mount=type=bind,from=wheels,target=/wheels sh install.sh gateway telemetry

FROM tools AS tokenizer-packages
RUN --mount=type=bind,from=wheels,target=/wheels sh install.sh tokenizer telemetry

FROM tools AS scheduler-packages
RUN --mount=type=bind,from=wheels,target=/wheels sh install.sh scheduler telemetry

FROM tools AS executor-packages
RUN --mount=type=bind,from=wheels,target=/wheels sh install.sh executor telemetry

FROM tools AS detokenizer-packages
RUN --mount=type=bind,from=wheels,target=/wheels sh install.sh detokenizer telemetry

# `shoal pull` has pip fetch models that are published as wheels.
FROM tools AS operator-packages
RUN --mount=type=bind,from=wheels,target=/wheels sh install.sh cli store && /opt/shoal/bin/python -m ensurepip > /dev/null


# The code is compiled here, since nothing can be written where it runs.
FROM base AS code
COPY shared /app/shared
COPY services /app/services
COPY shoal /app/shoal
RUN python3 -m compileall -q /app


FROM base AS service
COPY --from=code /app/shared /app/shared
COPY --from=code /app/services/__init__.py /app/services/__init__.py
ENV SHOAL_METRICS_HOST=0.0.0.0 \
    SHOAL_METRICS_PORT=9464
EXPOSE 9464
# Each question is a process of its own, some 50 ms of a core with all that Docker does for it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["python", "-S", "-m", "shared.health"]
USER 10001:10001

FROM service AS gateway
COPY --from=gateway-packages /opt/shoal /opt/shoal
COPY --from=code /app/services/gateway /app/services/gateway
ENV SHOAL_GATEWAY_HOST=0.0.0.0
EXPOSE 8000
CMD ["python", "-m", "services.gateway"]

FROM service AS tokenizer
COPY --from=tokenizer-packages /opt/shoal /opt/shoal
COPY --from=code /app/services/tokenizer /app/services/tokenizer
CMD ["python", "-m", "services.tokenizer"]

FROM service AS scheduler
COPY --from=scheduler-packages /opt/shoal /opt/shoal
COPY --from=code /app/services/scheduler /app/services/scheduler
CMD ["python", "-m", "services.scheduler"]

FROM service AS detokenizer
COPY --from=detokenizer-packages /opt/shoal /opt/shoal
COPY --from=code /app/services/detokenizer /app/services/detokenizer
CMD ["python", "-m", "services.detokenizer"]

# Compiled kernels and packed weights are kept in a volume on /var/cache/shoal: without one, each new container compiles
# for half a minute, and containers do not share weights in memory.
FROM service AS executor
COPY --from=executor-packages /opt/shoal /opt/shoal
COPY --from=code /app/services/executor /app/services/executor
ENV NUMBA_CACHE_DIR=/var/cache/shoal
CMD ["python", "-m", "services.executor"]


# The `shoal` command for operators: pull, models, status, pin, usage, chat.
FROM base AS operator
COPY --from=operator-packages /opt/shoal /opt/shoal
COPY --from=code /app/shared /app/shared
COPY --from=code /app/shoal /app/shoal
USER 10001:10001
ENTRYPOINT ["python", "-m", "shared.cli"]


FROM ${NATS_IMAGE} AS broker
RUN mkdir -p /data && chown 10001:10001 /data
COPY deploy/nats/nats.conf deploy/nats/users.conf /etc/nats/shoal/
USER 10001:10001
CMD ["nats-server", "--config", "/etc/nats/shoal/nats.conf"]

FROM ${HAPROXY_IMAGE} AS front
COPY deploy/haproxy/haproxy.cfg /usr/local/etc/haproxy/haproxy.cfg
