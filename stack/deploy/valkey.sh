# Starts Valkey with one user, `gateway`, whose password is in a file; it may only lease limits. Nothing is kept on a disk.
# The configuration comes by standard input, with a hash, so that the password is in no command, environment or file of this container.
set -eu
password=$(cat /run/store/password)
[ -n "$password" ] || { echo "/run/store/password is empty; write a password there" >&2; exit 1; }
hash=$(printf %s "$password" | sha256sum | cut -d " " -f 1)
exec valkey-server - <<END
port 6379
bind *
save ""
appendonly no
maxmemory 64mb
maxmemory-policy noeviction
user default off
user gateway on #$hash ~vw:* resetchannels -@all +eval +evalsha +info +time +hgetall +hset +hdel +pexpire
END
