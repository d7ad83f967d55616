# Keeps one node running: boots it, and boots it again when it reboots itself, which
# nspawn reports by exit status 133. Any other end leaves the node off.
#
# usage: keeper OWNED "KEEPER_CGROUPS" "NODE_CGROUPS" COMMAND ...
# With OWNED=true the node ends when the pipe on descriptor 3 is closed, which the
# kernel does when the owner ends.
set -eu
owned=$1 keeper_cgroups=$2 node_cgroups=$3
shift 3
join $keeper_cgroups
if [ "$owned" = true ]; then
	(
		read -r _ <&3 || :
		# Also the node's first process: it does not end with nspawn.
		find $node_cgroups -name cgroup.procs -exec cat {} + | sort -u | xargs -r kill -s KILL
		kill -s KILL 0
	) &
	watcher=$!
	trap 'kill "$watcher" 2>/dev/null || :' EXIT
	exec 3<&-
fi
while :; do
	rc=0
	# A shell of its own joins the node's cgroups, then becomes the command.
	sh -c "$JOIN_AND_EXEC" exec "$node_cgroups" "$@" || rc=$?
	[ "$rc" = 133 ] || exit "$rc"
done
