// Package s3store is an object store in memory, for tests of clients of S3.
package s3store

import (
	"bytes"
	"crypto/md5"
	"encoding/xml"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// Store is an object store in memory that speaks as much of S3, with the bucket
// in the path, as s3fs asks for. It looks at the key's name, not its signature.
// It is an [http.Handler] and safe for concurrent use.
type Store struct {
	bucket, key string

	mu      sync.Mutex
	objects map[string]object
}

// New returns an empty store with one bucket and one key.
func New(bucket, key string) *Store {
	return &Store{bucket: bucket, key: key, objects: map[string]object{}}
}

type object struct {
	data []byte
	meta http.Header
	at   time.Time
}

// Has returns the content of an object.
func (s *Store) Has(name string) (string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o, ok := s.objects[name]
	return string(o.data), ok
}

// Names are those of all objects, in order.
func (s *Store) Names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.objects))
}

func fail(w http.ResponseWriter, status int, code string) {
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	_, _ = fmt.Fprintf(w, "<Error><Code>%s</Code><Message>%s</Message></Error>", code, code) // the client may be gone
}

// ServeHTTP answers as the store.
func (s *Store) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	bucket, name, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	switch {
	case !strings.Contains(r.Header.Get("Authorization"), s.key):
		fail(w, http.StatusForbidden, "InvalidAccessKeyId")
		return
	case bucket != s.bucket:
		fail(w, http.StatusNotFound, "NoSuchBucket")
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case name == "" && r.Method == http.MethodGet:
		s.list(w, r)
	case r.Method == http.MethodPut:
		s.put(w, r, name)
	case r.Method == http.MethodDelete:
		delete(s.objects, name)
		w.WriteHeader(http.StatusNoContent)
	default:
		s.get(w, r, name)
	}
}

func (s *Store) get(w http.ResponseWriter, r *http.Request, name string) {
	o, ok := s.objects[name]
	if !ok {
		fail(w, http.StatusNotFound, "NoSuchKey")
		return
	}
	maps.Copy(w.Header(), o.meta)
	w.Header().Set("ETag", fmt.Sprintf(`"%x"`, md5.Sum(o.data)))
	http.ServeContent(w, r, "", o.at, bytes.NewReader(o.data))
}

func (s *Store) put(w http.ResponseWriter, r *http.Request, name string) {
	data, err := io.ReadAll(r.Body)
	if err != nil {
		fail(w, http.StatusBadRequest, "IncompleteBody")
		return
	}
	o := object{data: data, meta: http.Header{}, at: time.Now()}
	for k, v := range r.Header {
		if strings.HasPrefix(k, "X-Amz-Meta-") || k == "Content-Type" {
			o.meta[k] = v
		}
	}
	if from := r.Header.Get("X-Amz-Copy-Source"); from != "" {
		_, source, _ := strings.Cut(strings.TrimPrefix(from, "/"), "/")
		o.data = s.objects[source].data
	}
	s.objects[name] = o
	tag := fmt.Sprintf(`"%x"`, md5.Sum(o.data))
	w.Header().Set("ETag", tag)
	if r.Header.Get("X-Amz-Copy-Source") != "" {
		_, _ = fmt.Fprintf(w, "<CopyObjectResult><ETag>%s</ETag></CopyObjectResult>", tag)
	}
}

type listing struct {
	XMLName  xml.Name `xml:"ListBucketResult"`
	Contents []entry
	Prefixes []prefix `xml:"CommonPrefixes"`
}

type entry struct {
	Key, LastModified, ETag, StorageClass string
	Size                                  int
}

type prefix struct{ Prefix string }

func (s *Store) list(w http.ResponseWriter, r *http.Request) {
	start, delimiter := r.URL.Query().Get("prefix"), r.URL.Query().Get("delimiter")
	var out listing
	for _, name := range slices.Sorted(maps.Keys(s.objects)) {
		rest, ok := strings.CutPrefix(name, start)
		if !ok {
			continue
		}
		if i := strings.Index(rest, delimiter); delimiter != "" && i >= 0 {
			p := prefix{start + rest[:i+1]}
			if !slices.Contains(out.Prefixes, p) {
				out.Prefixes = append(out.Prefixes, p)
			}
			continue
		}
		o := s.objects[name]
		out.Contents = append(out.Contents, entry{
			Key: name, LastModified: o.at.UTC().Format(time.RFC3339), ETag: fmt.Sprintf(`"%x"`, md5.Sum(o.data)), StorageClass: "STANDARD", Size: len(o.data),
		})
	}
	w.Header().Set("Content-Type", "application/xml")
	_ = xml.NewEncoder(w).Encode(out) // the client may be gone
}
