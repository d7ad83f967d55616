package state

import bolt "go.etcd.io/bbolt"

// Migrate runs the migrations of this build and then more of them.
func Migrate(db *bolt.DB, more ...func(*bolt.Tx) error) error {
	return migrate(db, append(migrations[:len(migrations):len(migrations)], more...))
}

// LimitSelf bounds this process as the one that looks at a state file.
var LimitSelf = limitSelf
