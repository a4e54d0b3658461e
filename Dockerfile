# vllm-watch, one image for five services of docker-compose.yml: gateway, sidecar, board, init, cli. No engine and no GPU library inside:
# the container toolkit brings the driver's own into the sidecar.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY . .
# From the virtual environment's path to its interpreter nothing changes between the stages, so it is copied whole.
RUN python -m venv /opt/vllm-watch && /opt/vllm-watch/bin/pip install --no-cache-dir --disable-pip-version-check .

FROM python:3.11-slim-bookworm
COPY --from=build /opt/vllm-watch /opt/vllm-watch
ENV PATH=/opt/vllm-watch/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
# Volumes take owner and mode from these folders. Group 0 is Grafana's group too: it may enter and read its password, nothing else.
RUN install -d -o 10001 -g 0 -m 0750 /var/lib/vllm-watch /var/lib/vllm-watch/secrets /var/lib/vllm-watch/log /var/lib/vllm-watch/state
WORKDIR /var/lib/vllm-watch
USER 10001:0
ENTRYPOINT ["vllm-watch"]
CMD ["--help"]
