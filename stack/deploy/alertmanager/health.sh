# Health of Alertmanager in compose:   sh health.sh COMMAND...
# Fails with a sentence where a file that its configuration names cannot be read or is empty; else runs the command. Without this, the first notification
# would fail, which nobody may hear of. `docker inspect` shows what it printed.
config=${ALERTMANAGER_CONFIG:-/etc/alertmanager/alertmanager.yml}
for file in $(sed -n "s/^[- ]*[a-z_]*_file: *[\"']\{0,1\}\([^\"' ]*\).*/\1/p" "$config" | sort -u); do
  if [ ! -r "$file" ]; then
    echo "$file cannot be read by the user $(id -u): chmod 644 the file on the host, in a folder that only you may enter, and create the container anew"
    exit 1
  elif [ ! -s "$file" ]; then
    echo "$file is empty: set VLLM_WATCH_PAGE_FILE, VLLM_WATCH_TICKET_FILE or VLLM_WATCH_DEADMAN_FILE to the file that holds this secret"
    exit 1
  fi
done
exec "$@"
