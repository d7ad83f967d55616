package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
)

// intents tells which intents of a story the node has.
const intents = `systemctl stop busy-%[1]s.service 2>/dev/null
millwrightd status | grep -oE '(mount:/mnt/%[1]s/data|container:%[1]s|secret:/etc/%[1]s/key|slurm:[a-z]+) ' | sort -u; true`

// cleanup takes away what would slow the next trials down.
const cleanup = `umount /mnt/%[1]s/data 2>/dev/null; rm -rf /etc/systemd/system/mnt-%[1]s-data.mount /mnt/%[1]s /run/systemd/system/*%[1]s*
find /etc/systemd/system -lname '*mnt-%[1]s-data.mount' -delete
if test -e /etc/default/millwright-slurmd; then ` + noMember + `; fi`

// takeBack ends, by a task, what the story has left the node to restore: every
// later start of the agent would do so, in the middle of other stories. Then it
// takes away what would slow these down.
func (t *trial) takeBack(ctx context.Context) error {
	if err := t.revive(ctx); err != nil {
		return err
	}
	text, err := t.sh(ctx, fmt.Sprintf(intents, t.label))
	if err != nil {
		return err
	}
	keys := strings.Fields(text)
	// A member first: what is asked of one goes by way of Slurm.
	slices.SortStableFunc(keys, func(a, b string) int {
		return cmp.Compare(strings.Index(b, "slurm:"), strings.Index(a, "slurm:"))
	})
	for _, key := range keys {
		kind, object, _ := strings.Cut(key, ":")
		switch kind {
		case "mount":
			err = t.done(ctx, "storage.unmount", "target: "+object)
		case "container":
			err = t.done(ctx, "container.stop", "name: "+object)
		case "secret":
			err = t.done(ctx, "secret.remove", "path: "+object)
		default:
			err = noIntents(ctx, t, member("mw"))
		}
		if err != nil {
			return wrong("%s, which the story has left, cannot be taken back: %v", key, err)
		}
	}
	_, err = t.sh(ctx, fmt.Sprintf(cleanup, t.label))
	return err
}
