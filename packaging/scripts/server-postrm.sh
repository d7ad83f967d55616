#!/bin/sh
set -e
[ ! -d /run/systemd/system ] || systemctl daemon-reload
# Purging gives up the CA and all history.
[ "$1" != purge ] || rm -rf /var/lib/millwright-server
