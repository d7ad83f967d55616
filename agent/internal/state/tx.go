package state

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/proto/text"
)

// The buckets; doc.go draws them.
var (
	bucketMeta    = []byte("meta")
	bucketTasks   = []byte("tasks")
	bucketOpen    = []byte("open")
	bucketOrder   = []byte("order")
	bucketSteps   = []byte("steps")
	bucketSeen    = []byte("seen")
	bucketForget  = []byte("forget")
	bucketIntents = []byte("intents")
	bucketFrames  = []byte("frames")
	bucketClosing = []byte("closing")
	bucketOutputs = []byte("outputs")
)

// buckets are all that a file of the newest schema has.
var buckets = [][]byte{
	bucketMeta, bucketTasks, bucketOpen, bucketOrder, bucketSteps, bucketSeen, bucketForget,
	bucketIntents, bucketFrames, bucketClosing, bucketOutputs,
}

// Tx is one transaction. Its writes are kept aside and put into the file when
// the closure that it was given to has returned nil.
type Tx struct {
	bolt   *bolt.Tx
	cfg    Config
	writes map[string]map[string][]byte // by bucket and key; nil: deleted
	grown  sizes
	issued time.Time

	condemned  bool
	clockReset bool
	marked     bool
}

func newTx(btx *bolt.Tx, cfg Config) *Tx { return &Tx{bolt: btx, cfg: cfg} }

// run calls fn and turns a panic in it into an error: it may run in the
// goroutine of a caller that has nothing to do with it.
func (tx *Tx) run(fn func(*Tx) error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("change of the state: panic: %v", r)
		}
	}()
	if fn == nil {
		return nil
	}
	return fn(tx)
}

func (tx *Tx) dirty() bool { return len(tx.writes) > 0 }

func (tx *Tx) get(bucket, key []byte) []byte {
	if v, ok := tx.writes[string(bucket)][string(key)]; ok {
		return v
	}
	return tx.bolt.Bucket(bucket).Get(key)
}

func (tx *Tx) put(bucket, key, value []byte) {
	if value == nil {
		value = []byte{}
	}
	tx.write(bucket, key, value)
}

func (tx *Tx) delete(bucket, key []byte) { tx.write(bucket, key, nil) }

func (tx *Tx) write(bucket, key, value []byte) {
	if tx.writes == nil {
		tx.writes = map[string]map[string][]byte{}
	}
	b := tx.writes[string(bucket)]
	if b == nil {
		b = map[string][]byte{}
		tx.writes[string(bucket)] = b
	}
	b[string(key)] = value
}

// flush puts the writes into the file's transaction, in order of the keys.
func (tx *Tx) flush() error {
	for _, name := range slices.Sorted(maps.Keys(tx.writes)) {
		b := tx.bolt.Bucket([]byte(name))
		for _, key := range slices.Sorted(maps.Keys(tx.writes[name])) {
			value := tx.writes[name][key]
			var err error
			if value == nil {
				err = b.Delete([]byte(key))
			} else {
				err = b.Put([]byte(key), value)
			}
			if err != nil {
				return fmt.Errorf("write %s/%x: %w", name, key, err)
			}
		}
	}
	return nil
}

// scan calls fn for each key with the prefix, in order, from the key from on,
// until it returns false. It sees this transaction's own writes too.
func (tx *Tx) scan(bucket, prefix, from []byte, fn func(k, v []byte) (bool, error)) error {
	own := tx.writes[string(bucket)]
	keys := slices.Sorted(maps.Keys(own))
	if len(from) == 0 {
		from = prefix
	}
	c := tx.bolt.Bucket(bucket).Cursor()
	k, v := c.Seek(from)
	i, _ := slices.BinarySearch(keys, string(from))
	for {
		inFile := k != nil && bytes.HasPrefix(k, prefix)
		inOwn := i < len(keys) && bytes.HasPrefix([]byte(keys[i]), prefix)
		var key, value []byte
		switch {
		case !inFile && !inOwn:
			return nil
		case inOwn && (!inFile || keys[i] <= string(k)):
			if inFile && keys[i] == string(k) {
				k, v = c.Next()
			}
			key, value = []byte(keys[i]), own[keys[i]]
			i++
			if value == nil {
				continue
			}
		default:
			key, value = k, v
			k, v = c.Next()
		}
		if more, err := fn(key, value); err != nil || !more {
			return err
		}
	}
}

func number(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

func stepKey(taskID string, step uint32) []byte {
	return binary.BigEndian.AppendUint32([]byte(taskID+"/"), step)
}

// load decodes the record under key into m.
func (tx *Tx) load(bucket, key []byte, m proto.Message) error {
	b := tx.get(bucket, key)
	if b == nil {
		return fmt.Errorf("%s %q: %w", bucket, key, ErrNotFound)
	}
	if err := proto.Unmarshal(b, m); err != nil {
		return fmt.Errorf("decode %s %q: %w", bucket, key, err)
	}
	return nil
}

func (tx *Tx) store(bucket, key []byte, m proto.Message) error {
	b, err := text.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode %s %q: %w", bucket, key, err)
	}
	tx.put(bucket, key, b)
	return nil
}
