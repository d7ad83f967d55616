package state

import (
	"errors"
	"os"
	"path/filepath"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

// Migrate runs the migrations of this build and then more of them.
func Migrate(db *bolt.DB, more ...func(*bolt.Tx) error) error {
	return migrate(db, append(migrations[:len(migrations):len(migrations)], more...))
}

// LimitSelf bounds this process as the one that looks at a state file.
var LimitSelf = limitSelf

// Vouch makes the mark in dir describe the state file as it is now: what a medium
// that has lost its bits leaves behind, of which no inode tells.
func Vouch(dir string) error {
	m, err := openMark(filepath.Join(dir, markName))
	if err != nil {
		return err
	}
	info, err := os.Stat(filepath.Join(dir, dbName))
	if err != nil {
		return err
	}
	now, ok := stamped(info)
	next, cloned := proto.Clone(m.last).(*agentv1.JournalMark)
	if !ok || !cloned || next.GetSound() == nil {
		return errors.Join(errors.New("there is nothing to vouch for"), m.close())
	}
	next.Sound.Inode, next.Sound.Device = now.GetInode(), now.GetDevice()
	next.Sound.SizeBytes, next.Sound.ChangeTimeNanos = now.GetSizeBytes(), now.GetChangeTimeNanos()
	return errors.Join(m.write(next), m.close())
}

// Sizes are the bytes of frames that are kept in memory, and those that are there.
func Sizes(s *Store) (kept, there [2]int64, err error) {
	err = s.View(func(tx *Tx) error {
		got, err := tx.sizes()
		there = [2]int64{got.unacked, got.kept}
		return err
	})
	s.news.Lock()
	defer s.news.Unlock()
	return [2]int64{s.sizes.unacked, s.sizes.kept}, there, err
}
