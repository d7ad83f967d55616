package storage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

const (
	// keyDir holds the keys that came with mounts. The clients read them at each
	// boot, before anything could be fetched.
	keyDir     = "/etc/millwright-keys"
	keyDirMode = 0o700
	keyMode    = 0o400
	keyOwner   = "root"
)

// keyFile is the file from which a client reads its key.
type keyFile struct {
	path string
	ref  *taskv1.SecretRef // nil: somebody else brought it
}

// ownKeyPath is where the key of a mount is put that comes with it: the name of
// its unit, with + where that has \x. Systemd and libfuse each read a backslash
// in their own way; a + is never in the name of a unit.
func ownKeyPath(target string) string {
	return keyDir + "/" + strings.ReplaceAll(escapePath(target), `\x`, "+") + ".key"
}

// keyFileOf returns the key file of a spec; the path is empty when its source
// has none.
func keyFileOf(spec *storagev1.MountSpec) keyFile {
	var k keyFile
	switch src := spec.GetSource().(type) {
	case *storagev1.MountSpec_Cephfs:
		k = keyFile{src.Cephfs.GetKeyFile(), src.Cephfs.GetKey()}
	case *storagev1.MountSpec_S3:
		k = keyFile{src.S3.GetKeyFile(), src.S3.GetKey()}
	}
	if k.ref != nil {
		k.path = ownKeyPath(spec.GetTarget())
	}
	return k
}

// needed is what has to be on the node beforehand.
func (k keyFile) needed(field string) []secretFile {
	if k.ref != nil {
		return nil
	}
	return []secretFile{{field, k.path}}
}

// write is the step that puts the key there.
func (k keyFile) write() *taskv1.SecretWriteStep {
	return &taskv1.SecretWriteStep{Path: k.path, Secret: k.ref, Mode: keyMode, User: keyOwner, Group: keyOwner}
}

func checkKey(p *tasks.Problems, at, file string, ref *taskv1.SecretRef) {
	switch {
	case ref != nil && file != "":
		p.Add(at+".key_file", file, "is given beside key: the key comes with the mount, or is in a file of the node; leave one of them out")
	case ref != nil:
		tasks.CheckSecret(p, at+".key", ref)
	case file == "":
		p.Add(at+".key", "", "is required, or key_file: give key: {name: NAME} for a secret of millctl secret list, or the absolute path of a file of the node")
	default:
		checkSecretPath(p, at+".key_file", file)
	}
}

// keyState is what a node has of the key that comes with a mount.
type keyState struct {
	file     keyFile
	have     string // what is there, without what it holds; empty: nothing
	other    bool   // what is there is another key
	misfit   bool   // it is not as it has to be
	leftover bool   // there is one, and the spec wants none
	dir      bool   // the directory is there
}

// lookKey looks at the file that comes with the mount.
func (s *survey) lookKey(ctx context.Context, h host.Reader, k keyFile) error {
	s.key = keyState{file: k}
	own := ownKeyPath(s.target)
	st, err := h.SecretState(ctx, own, k.ref.GetSalt())
	if errors.Is(err, fs.ErrNotExist) {
		s.key.misfit = k.ref != nil
		if !s.key.misfit {
			return nil
		}
		_, err := h.Lstat(ctx, keyDir)
		s.key.dir = err == nil
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		return err
	}
	if err != nil {
		return unfit("%v: remove it", err)
	}
	s.key.dir = true
	s.key.have = fmt.Sprintf("%#o %s:%s", st.Mode.Perm(), st.User, st.Group)
	if k.ref == nil {
		s.key.leftover = true
		return nil
	}
	if s.key.other = !bytes.Equal(st.SHA256, k.ref.GetSha256()); s.key.other {
		s.key.have = "another key, " + s.key.have
	}
	err = step.SecretInPlace(ctx, h, k.write())
	if s.key.misfit = errors.Is(err, tasks.ErrNotSatisfied); s.key.misfit {
		err = nil
	}
	return err
}

func (s *survey) keyDifferences() []tasks.Difference {
	subject := "key in " + ownKeyPath(s.target)
	switch {
	case s.key.leftover:
		return []tasks.Difference{{Subject: subject, Have: s.key.have}}
	case s.key.misfit:
		want := fmt.Sprintf("the secret %s, %#o %s:%s", s.key.file.ref.GetName(), keyMode, keyOwner, keyOwner)
		return []tasks.Difference{{Subject: subject, Have: s.key.have, Want: want}}
	}
	return nil
}

// keySteps bring the key, or take it away.
func (s *survey) keySteps() []tasks.Step {
	if s.key.leftover {
		return []tasks.Step{step.RemoveSecret(&taskv1.SecretRemoveStep{Path: ownKeyPath(s.target)})}
	}
	if !s.key.misfit {
		return nil
	}
	var steps []tasks.Step
	if !s.key.dir {
		steps = append(steps, step.MakeDir(&taskv1.DirectoryStep{Path: keyDir, Mode: keyDirMode}))
	}
	return append(steps, step.WriteSecret(s.key.file.write()))
}
