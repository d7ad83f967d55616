#!/bin/sh
set -e
[ "$1" = configure ] || exit 0
systemd-sysusers millwright-server.conf
install -d -m 0700 -o millwright-server -g millwright-server /var/lib/millwright-server
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
if [ -e /var/lib/millwright-server/store.db ]; then
	systemctl enable millwright-server.service
	systemctl restart millwright-server.service
else
	echo "millwright-server: make its CA and state as the user millwright-server; /etc/millwright/server.yaml says how"
fi
