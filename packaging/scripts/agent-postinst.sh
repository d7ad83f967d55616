#!/bin/sh
set -e
[ "$1" = configure ] || exit 0
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
# A node that has joined, or has the bundle to join with, gets its agent. An
# upgrade restarts it; the commands of tasks run on in their own units.
if [ -e /etc/millwright/join.json ] || [ -e /var/lib/millwright/identity/node.json ]; then
	systemctl enable millwrightd.service
	systemctl restart millwrightd.service
else
	echo "millwright-agent: put the node's join bundle at /etc/millwright/join.json (mode 0600), then run: systemctl enable --now millwrightd"
fi
