package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"time"

	secretv1 "github.com/gpuaas/millwright/proto/millwright/secret/v1"
)

// vault are the stories in which an operator puts, rotates and removes a secret
// while the server is killed.
func vault() []story {
	first, second := secretValue("first"), secretValue("second")
	base := members()[0]
	base.strikes = "server.secret."
	base.prepare = func(l string) string { return "mkdir -p /etc/" + l }
	put, rotate, remove := base, base, base
	put.kind = "(secret put)"
	put.custom = func(ctx context.Context, t *trial) error {
		return changeSecret(ctx, t, nil, []string{first(t)}, first(t), "put", t.label, "-f", "-")
	}
	rotate.kind = "(secret rotated)"
	rotate.setup = func(ctx context.Context, t *trial) error {
		_, err := t.operator(ctx, first(t), "secret", "put", t.label, "-f", "-")
		return err
	}
	rotate.custom = func(ctx context.Context, t *trial) error {
		return changeSecret(ctx, t, []string{first(t)}, []string{first(t), second(t)}, second(t), "rotate", t.label, "-f", "-")
	}
	remove.kind = "(secret removed)"
	remove.setup = func(ctx context.Context, t *trial) error {
		if err := rotate.setup(ctx, t); err != nil {
			return err
		}
		_, err := t.operator(ctx, second(t), "secret", "rotate", t.label, "-f", "-")
		return err
	}
	remove.custom = func(ctx context.Context, t *trial) error {
		return changeSecret(ctx, t, []string{first(t), second(t)}, nil, "", "remove", t.label)
	}
	return []story{put, rotate, remove}
}

func secretValue(which string) func(*trial) string {
	return func(t *trial) string { return which + " value of " + t.label }
}

// changeSecret gives a command about a secret once. When the server dies of it,
// the secret must be as before or as after, or, of several versions that go,
// some of them whole; and the command, given again, must bring it there. A node
// must then be given the newest value.
func changeSecret(ctx context.Context, t *trial, before, after []string, value string, args ...string) error {
	args = append([]string{"secret"}, args...)
	_, first := t.c.MillctlInput(ctx, value, args...)
	seen, err := t.versions(ctx)
	if err != nil {
		return err
	}
	if first == nil && len(seen) != len(after) {
		return lostWork("millctl %s succeeded, and the server has %d versions, not %d", strings.Join(args, " "), len(seen), len(after))
	}
	if err := wholeVersions(seen, before, after); err != nil {
		return err
	}
	if first != nil {
		if !t.onServer() {
			return first
		}
		if err := t.again(ctx, len(seen) == 0 && len(after) == 0, value, args...); err != nil {
			return err
		}
	}
	if seen, err = t.versions(ctx); err != nil {
		return err
	}
	if len(seen) != len(after) {
		return wrong("given again, millctl %s leaves %d versions, not %d", strings.Join(args, " "), len(seen), len(after))
	}
	if err := wholeVersions(seen, after, after); err != nil || len(after) == 0 {
		return err
	}
	return t.arrives(ctx, after[len(after)-1])
}

// versions are what the server says that it keeps under the trial's label.
func (t *trial) versions(ctx context.Context) ([]*secretv1.Secret, error) {
	var list secretv1.ListSecretsResponse
	err := t.ask(ctx, &list, "secret", "list")
	return slices.DeleteFunc(list.GetSecrets(), func(s *secretv1.Secret) bool { return s.GetName() != t.label }), err
}

// wholeVersions asks that each version has the digest of a value that was given
// with its number, that there are not fewer than the smaller and not more than
// the larger of two sets, and that the newest alone is current.
func wholeVersions(seen []*secretv1.Secret, before, after []string) error {
	values := before
	if len(after) > len(before) {
		values = after
	}
	if least := min(len(before), len(after)); len(seen) < least || len(seen) > len(values) {
		return wrong("the server has %d versions, not %d to %d", len(seen), least, len(values))
	}
	for i, s := range seen {
		n := int(s.GetVersion())
		if n < 1 || n > len(values) || s.GetCurrent() != (i == len(seen)-1) {
			return wrong("version %d, current %t, is the %d. of %d", n, s.GetCurrent(), i+1, len(seen))
		}
		sum := sha256.Sum256(append(slices.Clone(s.GetSalt()), values[n-1]...))
		if !bytes.Equal(sum[:], s.GetSha256()) {
			return wrong("version %d has not the digest of its value", n)
		}
	}
	return nil
}

// again gives a command again. What is gone already cannot be removed: that is
// said so, and is the one thing that may be.
func (t *trial) again(ctx context.Context, gone bool, value string, args ...string) error {
	deadline := time.Now().Add(patience)
	for {
		_, err := t.c.MillctlInput(ctx, value, args...)
		switch {
		case err == nil && gone:
			return wrong("nothing was left to remove, and millctl says that it removed it")
		case err == nil, gone && strings.Contains(err.Error(), "no such secret"):
			return nil
		case time.Now().After(deadline) || ctx.Err() != nil:
			return err
		}
		pause(ctx, 50*time.Millisecond)
	}
}

// arrives asks that the value of the newest version comes to a node, whole.
func (t *trial) arrives(ctx context.Context, value string) error {
	file := "/etc/" + t.label + "/key"
	if err := t.done(ctx, "secret.place", fmt.Sprintf("path: %s\nsecret: {name: %s}", file, t.label)); err != nil {
		return err
	}
	got, err := t.sh(ctx, "cat "+file)
	if err == nil && got != value {
		err = wrong("the node was given %q, not %q", got, value)
	}
	return err
}
