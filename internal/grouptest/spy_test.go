//go:build linux

package grouptest

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/snapferry/snapferry/internal/cpwire"
)

// spy reads heads from one member all the time, whether it leads or not, as a client does
// that has missed an election. Requests do not wait for each other: some lie before a
// member that stands still, and what it answers when it goes on must be true then.
func (h *history) spy(m *member, number int) {
	const atOnce = 8
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	room := make(chan struct{}, atOnce)
	for {
		select {
		case <-again.C:
		case <-h.stop:
			return
		}
		task := h.recent.Load()
		if task == nil {
			continue
		}
		select {
		case room <- struct{}{}:
			h.owned.Go(func() {
				h.peek(ctx, m, *task, number)
				<-room
			})
		default: // it is slow to answer
		}
	}
}

// peek notes what a member says the head is. That it says nothing is no news.
func (h *history) peek(ctx context.Context, m *member, task cpwire.Task, number int) {
	ctx, cancel := context.WithTimeout(ctx, 8*time.Second)
	defer cancel()
	url := m.url + cpwire.PathTasks + "/" + task.Job + "/" + task.Name + "/head?body=0"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		h.g.base.Error(err)
		return
	}
	began := h.now()
	resp, err := asking.Do(req)
	if err != nil {
		return
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return
	}
	slot, err := strconv.ParseUint(resp.Header.Get("Snapferry-Slot"), 10, 64)
	digest, derr := cpwire.ParseDigest(resp.Header.Get("Snapferry-Digest"))
	if err != nil || derr != nil {
		h.g.base.Errorf("%s answers with the header %v", m.id, resp.Header)
		return
	}
	h.add(porcupine.Operation{ClientId: number, Input: call{task: task}, Call: began, Output: answer{head: head{slot, digest}}, Return: h.now()})
}
