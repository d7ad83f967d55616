package state

import (
	"encoding/binary"
	"fmt"

	"google.golang.org/protobuf/proto"

	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

// The keys of health lie beside others in the bucket meta, so that a release
// that knows nothing of them can use the file.
var (
	keyHealth       = []byte("health/")
	keyHealthCursor = []byte("health-cursor")
)

// PutHealth remembers the edge of a condition that was told last.
func (tx *Tx) PutHealth(edge *healthv1.HealthEdge) error {
	return tx.store(bucketMeta, append(keyHealth[:len(keyHealth):len(keyHealth)], edge.GetCondition().GetKey()...), edge)
}

// Health returns the edge that was told last of each condition, by its key.
func (tx *Tx) Health() (out []*healthv1.HealthEdge, err error) {
	err = tx.scan(bucketMeta, keyHealth, nil, func(k, v []byte) (bool, error) {
		edge := new(healthv1.HealthEdge)
		if err := proto.Unmarshal(v, edge); err != nil {
			return false, fmt.Errorf("decode %q: %w", k, err)
		}
		out = append(out, edge)
		return true, nil
	})
	return out, err
}

// DeleteHealth forgets a condition.
func (tx *Tx) DeleteHealth(key string) {
	tx.delete(bucketMeta, append(keyHealth[:len(keyHealth):len(keyHealth)], key...))
}

// PutHealthCursor remembers up to which record of a boot the kernel's log was
// read for what was told.
func (tx *Tx) PutHealthCursor(bootID string, sequence uint64) {
	tx.put(bucketMeta, keyHealthCursor, append(number(sequence), bootID...))
}

// HealthCursor returns up to where the kernel's log was read; "" when it never
// was.
func (tx *Tx) HealthCursor() (bootID string, sequence uint64) {
	b := tx.get(bucketMeta, keyHealthCursor)
	if len(b) < 8 {
		return "", 0
	}
	return string(b[8:]), binary.BigEndian.Uint64(b)
}
