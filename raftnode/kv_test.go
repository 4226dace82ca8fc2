package raftnode_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/snapferry/snapferry/raftnode"
)

// kv is a small state machine: a map in memory. What survives a restart is what Install
// has put into its directory; everything above comes again from the log.
type kv struct {
	dir string

	mu    sync.Mutex
	state kvState
}

type kvState struct {
	Applied uint64            `json:"applied"`
	Pairs   map[string]string `json:"pairs"`
}

const kvFile = "state.json"

func openKV(dir string) (raftnode.StateMachine, error) {
	s := &kv{dir: dir, state: kvState{Pairs: map[string]string{}}}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	if err := s.load(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return s, nil
}

func (s *kv) load(dir string) error {
	data, err := os.ReadFile(filepath.Join(dir, kvFile))
	if err != nil {
		return err
	}
	state := kvState{Pairs: map[string]string{}}
	if err := json.Unmarshal(data, &state); err != nil {
		return err
	}
	s.state = state
	return nil
}

// Apply takes "key=value" and returns the value that was there before.
func (s *kv) Apply(entries []raftnode.Entry) ([][]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	results := make([][]byte, len(entries))
	for i, e := range entries {
		if e.Index != s.state.Applied+1 && s.state.Applied != 0 {
			return nil, fmt.Errorf("entry %d after %d", e.Index, s.state.Applied)
		}
		s.state.Applied = e.Index
		if key, value, ok := strings.Cut(string(e.Data), "="); ok {
			results[i] = []byte(s.state.Pairs[key])
			s.state.Pairs[key] = value
		}
	}
	return results, nil
}

func (s *kv) AppliedIndex() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state.Applied
}

func (s *kv) Snapshot(dir string) error {
	s.mu.Lock()
	data, err := json.Marshal(s.state)
	s.mu.Unlock()
	if err == nil {
		err = os.Mkdir(dir, 0o755)
	}
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, kvFile), data, 0o644)
}

func (s *kv) Install(dir string) error {
	data, err := os.ReadFile(filepath.Join(dir, kvFile))
	if err != nil {
		return err
	}
	next := filepath.Join(s.dir, kvFile+".next")
	if err := os.WriteFile(next, data, 0o644); err != nil {
		return err
	}
	if err := os.Rename(next, filepath.Join(s.dir, kvFile)); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.load(s.dir)
}

func (s *kv) Close() error { return nil }

func (s *kv) pairs() map[string]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.state.Pairs)
}
