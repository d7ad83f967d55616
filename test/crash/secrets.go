package main

import (
	"context"
	"fmt"
)

// secrets are secret.place and secret.remove.
func secrets() []story {
	place := story{
		kind: "secret.place", state: succeeded, facts: secretFacts,
		spec: func(l string) string {
			return fmt.Sprintf("path: /etc/%[1]s/key\nsecret: {name: %[1]s}\nreplace: true", l)
		},
		prepare: func(l string) string { return "mkdir -p /etc/" + l },
		setup: func(ctx context.Context, t *trial) error {
			_, err := t.operator(ctx, "value of "+t.label, "secret", "put", t.label, "-f", "-")
			return err
		},
	}
	over := place
	over.variant = "over another file"
	over.prepare = func(l string) string { return fmt.Sprintf("mkdir -p /etc/%[1]s; echo before > /etc/%[1]s/key", l) }
	swapped := over
	swapped.variant, swapped.state, swapped.reason, swapped.undo = "that the server has no more", failed, "SECRET_WRONG", notNeeded
	swapped.setup = func(ctx context.Context, t *trial) error {
		if err := place.setup(ctx, t); err != nil {
			return err
		}
		if _, err := t.operator(ctx, "another value of "+t.label, "secret", "rotate", t.label, "-f", "-"); err != nil {
			return err
		}
		_, err := t.operator(ctx, "", "secret", "remove", t.label, "--old")
		return err
	}
	swapped.spec = func(l string) string { // signed with a digest that no version has
		return fmt.Sprintf("path: /etc/%[1]s/key\nsecret: {name: %[1]s, salt: AAECAwQFBgcICQoLDA0ODw==, sha256: QvbXb9gbAdfwnacLOWy8SGS3Ew+SN9RBVJ6gUILkJks=}\nreplace: true", l)
	}
	remove := story{
		kind: "secret.remove", state: succeeded, facts: secretFacts, prepare: place.prepare,
		spec: func(l string) string { return "path: /etc/" + l + "/key" },
		setup: func(ctx context.Context, t *trial) error {
			if err := place.setup(ctx, t); err != nil {
				return err
			}
			return t.done(ctx, "secret.place", place.spec(t.label))
		},
	}
	return []story{place, over, swapped, remove}
}

// secretFacts tell the file, who may read it, what a write or an ended task left
// behind, and the intent.
func secretFacts(l string) string {
	return fmt.Sprintf(`f=/etc/%[1]s/key; echo mode=$(stat -c %%a:%%U:%%G $f 2>/dev/null) content=$(sha256sum < $f 2>/dev/null | sed s/-// | cut -c1-0)$(grep -c %[1]s $f 2>/dev/null) \
 files=$(ls -A /etc/%[1]s | wc -l) kept=$(ls -A /var/lib/millwright/secrets 2>/dev/null | wc -l) intent=$(millwrightd status | grep -c "secret:$f ")`, l)
}
