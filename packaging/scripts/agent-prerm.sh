#!/bin/sh
set -e
# An upgrade leaves the agent running until the new one is there.
[ "$1" = remove ] || exit 0
[ -d /run/systemd/system ] || exit 0
systemctl disable --now millwrightd.service
