#!/bin/sh
# Is this host ready for `docker compose up`?   sh stack/deploy/preflight.sh [cpu|mig] [secure]
# Checks Docker, compose, the NVIDIA driver and the container toolkit, and says what to install. Changes nothing.
# With `cpu`, checks only what the overlay without a GPU needs; with `mig`, also the slices that compose.mig.yml gives to teams; with `secure`, that
# compose.secure.yml is meant. It warns of secret files that others on this host can read, and of an address that nothing protects.
# Exit status 0: ready; 1: something is missing.
# A script of the host on purpose: from inside a container neither the driver nor the toolkit's set-up can be seen.
ready=0

good() { printf 'ok       %s\n' "$1"; }
bad() { printf 'missing  %s\n         %s\n' "$1" "$2"; ready=1; }
warn() { printf 'warning  %s\n         %s\n' "$1" "$2"; }
# setting NAME: as compose sees it, from the environment or from .env, where the last line counts and quotes may stand
setting() {
  eval "value=\${$1:-}"
  [ -n "$value" ] || value=$(sed -n "s/^$1=[\"']\{0,1\}\([^\"']*\).*/\1/p" .env 2>/dev/null | sed '$!d')
}
# at_least 2.24.4 2.40.3: is the second release the first or later?
at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }

if ! command -v docker >/dev/null 2>&1; then
  bad "Docker" "Install Docker Engine: https://docs.docker.com/engine/install/"
elif ! engine=$(docker version --format '{{.Server.Version}}' 2>/dev/null) || [ -z "$engine" ]; then
  bad "a Docker engine that answers" "Start it (sudo systemctl start docker), and let your user in (sudo usermod -aG docker \$USER, log in again)."
else
  good "Docker engine $engine"
  compose=$(docker compose version --short 2>/dev/null | sed 's/^v//')
  if [ -z "$compose" ]; then
    bad "docker compose" "Install the plugin: https://docs.docker.com/compose/install/linux/"
  elif ! at_least 2.24.4 "$compose"; then
    bad "docker compose 2.24.4 or later (this is $compose)" "Older ones do not know !reset. Update the docker-compose-plugin package."
  else
    good "docker compose $compose"
  fi
fi

# Files with secrets are mounted as they are on the host, with their owner and mode.
for name in VLLM_WATCH_HF_TOKEN_FILE VLLM_WATCH_PAGE_FILE VLLM_WATCH_TICKET_FILE VLLM_WATCH_DEADMAN_FILE; do
  setting "$name"
  file=$value
  [ -n "$file" ] && [ "$file" != /dev/null ] || continue
  if [ ! -f "$file" ]; then
    bad "$name ($file is no file)" "Give it the path of a file that holds the secret and nothing else."
  elif [ "$name" = VLLM_WATCH_HF_TOKEN_FILE ]; then
    [ -z "$(find -L "$file" -prune -perm -004)" ] || warn "$file can be read by everybody on this host" "chmod 600 $file"
  elif [ -z "$(find -L "$file" -prune -perm -004)" ]; then
    bad "$name ($file cannot be read by Alertmanager, which runs as nobody)" "chmod 644 $file, in a folder that only you may enter."
  else
    case $file in */*) folder=${file%/*} ;; *) folder=. ;; esac
    [ -z "$(find -L "${folder:-/}" -prune -perm -001)" ] || warn "$file can be read by everybody on this host" \
      "Move it into a folder that only you may enter (chmod 700)."
  fi
done

setting VLLM_WATCH_BIND
case "$value" in
  "" | 127.* | localhost | ::1 | "[::1]") ;;
  *)
    bind=$value
    case " $* ${COMPOSE_FILE:-}" in
      *secure*)
        setting VLLM_WATCH_HOSTNAME
        good "ports on $bind, with TLS and logins"
        [ -n "$value" ] || warn "VLLM_WATCH_HOSTNAME is not set" "Certificates and links name localhost and $bind only; set it to the name by which others call this host."
        ;;
      *) warn "VLLM_WATCH_BIND=$bind without compose.secure.yml" \
        "Ports stay on 127.0.0.1: without TLS and logins they are bound nowhere else. Add -f stack/deploy/compose.secure.yml (docs/guides/hardening.md)." ;;
    esac
    ;;
esac

if [ "${1:-}" = cpu ]; then
  exit "$ready"
fi

# CUDA 13, which the default vLLM image is built with, asks for driver 580 (NVIDIA, CUDA toolkit release notes).
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
case $driver in
  [0-9]*)
    if at_least 580 "$driver"; then
      good "NVIDIA driver $driver"
    else
      bad "NVIDIA driver 580 or later (this is $driver)" \
        "Update it, or run the image for CUDA 12: VLLM_WATCH_ENGINE_IMAGE=vllm/vllm-openai:v0.32.0-cu129 docker compose up"
    fi
    ;;
  *)
    bad "the NVIDIA driver (nvidia-smi gives no version)" \
      "Install your distribution's NVIDIA driver and reboot; without a GPU: docker compose -f docker-compose.yml -f stack/deploy/compose.cpu.yml up"
    ;;
esac

# What Docker itself looks for when it starts (moby, daemon/nvidia_linux.go); a runtime configured in daemon.json is not needed.
if command -v nvidia-container-runtime-hook >/dev/null 2>&1; then
  good "NVIDIA container toolkit (should docker say: could not select device driver \"nvidia\", restart it: sudo systemctl restart docker)"
else
  bad "the NVIDIA container toolkit (without it docker says: could not select device driver \"nvidia\")" \
    "Install nvidia-container-toolkit (https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html) and restart docker."
fi

if [ "${1:-}" = mig ]; then
  slices=$(nvidia-smi -L 2>/dev/null)
  taken=
  for name in $(grep -o 'TEAM_[A-Z0-9_]*_MIG' "${0%/*}/compose.mig.yml" | sort -u); do
    setting "$name"
    uuid=$value
    case " $taken " in *" ${uuid:-none} "*) bad "a slice of its own for $name" "Two teams have $uuid; give each its own."; continue ;; esac
    taken="$taken $uuid"
    if [ -z "$uuid" ]; then
      bad "$name" "Set it to the UUID of that team's slice, as nvidia-smi -L shows it (MIG-...); how to make slices: docs/guides/mig.md"
    elif printf '%s\n' "$slices" | grep -q "(UUID: $uuid)"; then
      good "$name $uuid"
    else
      bad "the slice of $name ($uuid is not among those of nvidia-smi -L)" "Slices are gone after a reboot: make them again (docs/guides/mig.md)."
    fi
  done
fi
exit "$ready"
