#!/bin/sh
set -e
[ "$1" = remove ] || exit 0
[ -d /run/systemd/system ] || exit 0
systemctl disable --now millwright-server.service
