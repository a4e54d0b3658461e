# vllm-watch, one image for gateway, sidecar, board, init and cli of docker-compose.yml, and credentials and rules of compose.secure.yml.
# No engine and no GPU library inside: the container toolkit brings the driver's own into the sidecar.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY . .
# From the virtual environment's path to its interpreter nothing changes between the stages, so it is copied whole; it has no pip of its own.
# What is not ours comes with the hashes of requirements/, also what makes our wheel.
ARG PIP="/opt/build/bin/pip --no-cache-dir --disable-pip-version-check"
RUN python -m venv /opt/build && python -m venv --without-pip /opt/vllm-watch \
 && $PIP install --no-compile --require-hashes -r requirements/build.txt \
 && $PIP wheel --quiet --no-deps --no-build-isolation --wheel-dir /opt/build/wheel . \
 && $PIP --python /opt/vllm-watch/bin/python install --require-hashes -r requirements/run.txt \
 && $PIP --python /opt/vllm-watch/bin/python install --no-deps /opt/build/wheel/*.whl

FROM python:3.11-slim-bookworm
COPY --from=build /opt/vllm-watch /opt/vllm-watch
ENV PATH=/opt/vllm-watch/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
# Volumes take owner and mode from these folders. Group 0 is Grafana's group too: it may enter and read its password, nothing else.
# Rules and targets are no secret, and Prometheus is of no group of ours.
RUN install -d -o 10001 -g 0 -m 0750 /var/lib/vllm-watch /var/lib/vllm-watch/secrets /var/lib/vllm-watch/log /var/lib/vllm-watch/state /var/lib/vllm-watch/store /var/lib/vllm-watch/dataset \
 && install -d -o 10001 -g 0 -m 0755 /var/lib/vllm-watch/rules /var/lib/vllm-watch/targets
WORKDIR /var/lib/vllm-watch
USER 10001:0
ENTRYPOINT ["vllm-watch"]
CMD ["--help"]
