package home

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	secretv1 "github.com/gpuaas/millwright/proto/millwright/secret/v1"
)

// secretsFile is, beside a context, what is known of the secrets that were put
// from here. No value is in it.
func (h *Home) secretsFile(context string) string {
	return filepath.Join(h.dir, contextsDir, context+".secrets")
}

// Secrets returns the digests of the secrets that this operator has put to the
// server of a context: the newest of each name. They are what a signature is
// made over, and so never the server's word.
func (h *Home) Secrets(context string) ([]*secretv1.Secret, error) {
	list := &secretv1.ListSecretsResponse{}
	err := readMessage(h.secretsFile(context), list)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return list.GetSecrets(), err
}

// KeepSecret notes the digest of a secret, in place of an older one of its name.
func (h *Home) KeepSecret(context string, secret *secretv1.Secret) error {
	return h.changeSecrets(context, secret.GetName(), secret)
}

// DropSecret forgets a secret.
func (h *Home) DropSecret(context, name string) error {
	return h.changeSecrets(context, name, nil)
}

func (h *Home) changeSecrets(context, name string, secret *secretv1.Secret) (err error) {
	if err := os.MkdirAll(filepath.Join(h.dir, contextsDir), dirMode); err != nil {
		return fmt.Errorf("note secret %s: %w", name, err)
	}
	unlock, err := lock(h.secretsFile(context) + ".lock")
	if err != nil {
		return fmt.Errorf("note secret %s: %w", name, err)
	}
	defer func() { err = errors.Join(err, unlock()) }()
	have, err := h.Secrets(context)
	if err != nil {
		return err
	}
	list := &secretv1.ListSecretsResponse{}
	for _, s := range have {
		if s.GetName() != name {
			list.Secrets = append(list.Secrets, s)
		}
	}
	if secret != nil {
		list.Secrets = append(list.Secrets, secret)
	}
	data, err := Encode(list)
	if err != nil {
		return err
	}
	if err := replace(h.secretsFile(context), data); err != nil {
		return fmt.Errorf("note secret %s: %w", name, err)
	}
	return nil
}

// lock waits until no other millctl changes what a file of this name stands for,
// and keeps others from it until unlock is called.
func lock(file string) (unlock func() error, err error) {
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", file, err), f.Close())
	}
	return f.Close, nil
}
