#!/bin/sh
# The health check of NATS: status 0 while it serves. After a full disk a stream takes no message until the server is
# started again, though there is room: then this ends the server, and whatever runs it starts it again.
# Usage: nats-health.sh [HOST PORT FOLDER PROCESS]
host=${1:-127.0.0.1} port=${2:-8222} folder=${3:-/data} process=${4:-1}
wget -q -O /dev/null "http://$host:$port/healthz?js-server-only=true" || exit 1
printf 'GET /healthz HTTP/1.0\r\n\r\n' | nc -w 2 "$host" "$port" | grep -q 'write error' || exit 0
dd if=/dev/zero of="$folder/.room" bs=1048576 count=1 2>/dev/null && room=yes
rm -f "$folder/.room"
[ "$room" ] && kill "$process"
exit 1
