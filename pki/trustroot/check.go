package trustroot

import (
	"bytes"
	"cmp"
	"crypto/ed25519"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/envelope"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const maxKeys = 512

// CheckForm checks what can be said of one version by itself: sorted keys with
// true ids and known roles, thresholds that can be met, no key that is also
// removed, and at least one recovery key.
func CheckForm(root *taskv1.TrustRoot) error {
	switch {
	case root.GetVersion() == 0:
		return errors.New("version is 0: versions begin at 1")
	case root.GetVersion() > 1 && len(root.GetPrevious()) != envelope.HashSize:
		return fmt.Errorf("previous has %d bytes: want %d", len(root.GetPrevious()), envelope.HashSize)
	case root.GetVersion() == 1 && len(root.GetPrevious()) != 0:
		return errors.New("previous is set: the genesis has none")
	case root.GetIssuedAt() == nil || !root.GetIssuedAt().IsValid():
		return errors.New("issued_at must be set to a valid time")
	}
	if err := pki.CheckTrustDomain(root.GetTrustDomain()); err != nil {
		return err
	}
	if err := checkKeys(root.GetKeys()); err != nil {
		return err
	}
	if err := checkThresholds(root); err != nil {
		return err
	}
	return checkRemoved(root)
}

func checkKeys(keys []*taskv1.TrustKey) error {
	if len(keys) > maxKeys {
		return fmt.Errorf("%d keys: at most %d are allowed", len(keys), maxKeys)
	}
	for i, k := range keys {
		if err := checkKey(k); err != nil {
			return fmt.Errorf("keys[%d]: %w", i, err)
		}
		if i > 0 && !cmp.Less(keys[i-1].GetId(), k.GetId()) {
			return fmt.Errorf("keys[%d]: id %s: sort the keys by id and list each once", i, k.GetId())
		}
	}
	if !slices.ContainsFunc(keys, hasRole(taskv1.KeyRole_KEY_ROLE_RECOVERY)) {
		return errors.New("no key has the role recovery: without one the root can never be changed")
	}
	return nil
}

func checkKey(k *taskv1.TrustKey) error {
	switch {
	case k.GetType() != taskv1.KeyType_KEY_TYPE_ED25519:
		return fmt.Errorf("type %s: want KEY_TYPE_ED25519", k.GetType())
	case len(k.GetPublicKey()) != ed25519.PublicKeySize:
		return fmt.Errorf("public key has %d bytes: want %d", len(k.GetPublicKey()), ed25519.PublicKeySize)
	case k.GetId() != envelope.KeyID(k.GetType(), k.GetPublicKey()):
		return fmt.Errorf("id %q is not the id of its public key", k.GetId())
	case len(k.GetRoles()) == 0:
		return errors.New("roles are missing: a key has at least one")
	case k.GetNotAfter() != nil && !k.GetNotAfter().IsValid():
		return errors.New("not_after is not a valid time")
	}
	for i, role := range k.GetRoles() {
		if role == taskv1.KeyRole_KEY_ROLE_UNSPECIFIED || i > 0 && k.GetRoles()[i-1] >= role {
			return fmt.Errorf("roles[%d]: %s: sort the roles by number and name each known one once", i, role)
		}
	}
	if err := pki.CheckName(k.GetName()); err != nil {
		return fmt.Errorf("holder: %w", err)
	}
	return nil
}

func checkThresholds(root *taskv1.TrustRoot) error {
	list := root.GetThresholds()
	for i, t := range list {
		have := 0
		for _, k := range root.GetKeys() {
			if hasRole(t.GetRole())(k) {
				have++
			}
		}
		switch {
		case t.GetRole() == taskv1.KeyRole_KEY_ROLE_UNSPECIFIED || i > 0 && list[i-1].GetRole() >= t.GetRole():
			return fmt.Errorf("thresholds[%d]: %s: sort them by role and name each known one once", i, t.GetRole())
		case t.GetKeys() == 0 || int64(t.GetKeys()) > int64(have):
			return fmt.Errorf("thresholds[%d]: %d keys of role %s: it must be 1 to the %d that there are", i, t.GetKeys(), t.GetRole(), have)
		}
	}
	return nil
}

func checkRemoved(root *taskv1.TrustRoot) error {
	for i, r := range root.GetRemoved() {
		isKey := func(k *taskv1.TrustKey) bool { return k.GetId() == r.GetId() }
		switch {
		case r.GetId() == "" || i > 0 && !cmp.Less(root.GetRemoved()[i-1].GetId(), r.GetId()):
			return fmt.Errorf("removed[%d]: id %q: sort them by id and list each once", i, r.GetId())
		case r.GetCompromisedSince() != nil && !r.GetCompromisedSince().IsValid():
			return fmt.Errorf("removed[%d]: compromised_since is not a valid time", i)
		case slices.ContainsFunc(root.GetKeys(), isKey):
			return fmt.Errorf("removed[%d]: key %s is listed under keys too: a removed key never comes back", i, r.GetId())
		}
	}
	return nil
}

func (v *version) checkGenesis() error {
	switch {
	case v.root.GetVersion() != 1:
		return fmt.Errorf("it is version %d: want 1", v.root.GetVersion())
	case len(v.root.GetRemoved()) > 0:
		return errors.New("it removes keys: there is nothing to remove yet")
	case !slices.ContainsFunc(v.root.GetKeys(), hasRole(taskv1.KeyRole_KEY_ROLE_OPERATOR)):
		return errors.New("no key has the role operator: no one could sign a task")
	}
	return nil
}

// checkUpdate checks that v may follow prev.
func (v *version) checkUpdate(env *taskv1.Envelope, prev *version) error {
	switch {
	case !bytes.Equal(v.root.GetPrevious(), prev.hash[:]):
		return fmt.Errorf("it follows %x, and version %d is %x", v.root.GetPrevious(), prev.root.GetVersion(), prev.hash)
	case v.root.GetTrustDomain() != prev.root.GetTrustDomain():
		return fmt.Errorf("trust domain %q: it was %q and cannot change", v.root.GetTrustDomain(), prev.root.GetTrustDomain())
	case v.root.GetIssuedAt().AsTime().Before(prev.root.GetIssuedAt().AsTime()):
		return fmt.Errorf("it was issued at %s, before version %d", v.root.GetIssuedAt().AsTime().Format(time.RFC3339), prev.root.GetVersion())
	}
	if err := v.checkRemovals(prev); err != nil {
		return err
	}
	return v.checkSigners(env, prev)
}

// checkRemovals makes removal win: what was removed stays so, and what is gone
// is named, so that a key cannot be dropped today and be new tomorrow.
func (v *version) checkRemovals(prev *version) error {
	removed := make(map[string]*taskv1.RemovedKey)
	for _, r := range v.root.GetRemoved() {
		removed[r.GetId()] = r
	}
	for _, old := range prev.root.GetRemoved() {
		now, ok := removed[old.GetId()]
		if !ok {
			return fmt.Errorf("key %s is no longer listed as removed: a removal is for ever", old.GetId())
		}
		before := optionalTime(old.GetCompromisedSince())
		after := optionalTime(now.GetCompromisedSince())
		if !before.IsZero() && (after.IsZero() || after.After(before)) {
			return fmt.Errorf("removed key %s: compromised_since can only move to an earlier time", old.GetId())
		}
	}
	for id := range prev.keys {
		if v.keys[id] == nil && removed[id] == nil {
			return fmt.Errorf("key %s is gone and not listed as removed", id)
		}
	}
	return nil
}

// checkSigners checks that env carries enough signatures of by's recovery keys.
// The genesis is signed by its own keys; its operators sign too, to show that
// they hold their keys.
func (v *version) checkSigners(env *taskv1.Envelope, by *version) error {
	_, ids, err := envelope.Verify(env, envelope.TrustRootType, by.publicKey)
	if err != nil {
		return err
	}
	genesis := v == by
	issued := v.root.GetIssuedAt().AsTime()
	count := 0
	for _, id := range ids {
		key := by.keys[id]
		recovery := hasRole(taskv1.KeyRole_KEY_ROLE_RECOVERY)(key)
		switch {
		case !recovery && !genesis:
			return fmt.Errorf("key %s of %s may not sign the trust root: it is no recovery key", id, key.GetName())
		case ended(key, issued):
			return fmt.Errorf("key %s of %s ended at %s", id, key.GetName(), key.GetNotAfter().AsTime().Format(time.RFC3339))
		case recovery:
			count++
		}
	}
	if want := by.threshold(taskv1.KeyRole_KEY_ROLE_RECOVERY); count < want {
		return fmt.Errorf("%d recovery keys signed: %d must", count, want)
	}
	return nil
}

func hasRole(role taskv1.KeyRole) func(*taskv1.TrustKey) bool {
	return func(k *taskv1.TrustKey) bool { return slices.Contains(k.GetRoles(), role) }
}

// ended reports whether nothing that the key signed at a time counts.
func ended(k *taskv1.TrustKey, at time.Time) bool {
	return k.GetNotAfter() != nil && !at.Before(k.GetNotAfter().AsTime())
}

func optionalTime(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}
