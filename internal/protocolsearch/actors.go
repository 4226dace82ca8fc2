package protocolsearch

// become emits a world in which an owner has made a step.
type become func(w world, o owner, act string)

// ownerSteps makes the steps of P4 and P5 for one owner.
func (m *model) ownerSteps(w world, i int, out emit) {
	o := w.owners[i]
	to := func(w world, o owner, act string) {
		w.owners[i] = o
		out(w, Event{"owner", act})
	}
	deleteSteps(w, o.dels, func(w world, left set) {
		o := o
		o.dels = left
		to(w, o, "deletes a dead blob")
	})
	if o.pc != off {
		to(w, owner{}, "crashes")
	}

	switch o.pc {
	case off:
		m.startClaim(w, o, to)
	case claiming:
		m.appendSteps(w, o.app, func(w world, a appender, res outcome, act string) {
			w.owners[i] = m.afterClaim(o, a, res)
			out(w, Event{"claim", act})
		})
	case ready:
		m.startAttempt(w, o, to)
	case uploaded:
		m.giveUp(w, o, to)
		m.seal(w, o, to)
	case publish:
		if m.broken == AbortDeletes {
			m.abort(w, o, to)
		}
		m.appendSteps(w, o.app, func(w world, a appender, res outcome, act string) {
			w.owners[i] = m.afterCommit(w, o, a, res)
			out(w, Event{"commit", act})
		})
	case reread:
		m.giveUp(w, o, to)
		m.rereadHead(w, o, to)
	case lateSeal:
		w.sealed |= w.fresh & one(o.att)
		w.fresh &^= one(o.att)
		to(w, o.withoutAttempt(), "seals after publishing")
	}
}

// deleteSteps deletes one of the blobs that an actor has found dead, however long ago.
func deleteSteps(w world, dels set, then func(w world, left set)) {
	dels.each(func(att uint8) {
		n := w
		n.remove(one(att))
		then(n, dels&^one(att))
	})
}

// withoutAttempt is the owner between two attempts.
func (o owner) withoutAttempt() owner {
	return owner{pc: ready, known: o.known, by: o.by, epoch: o.epoch, dels: o.dels}
}

// stopped is an owner that was fenced. It still holds its list of dead blobs.
func (o owner) stopped() owner { return owner{dels: o.dels} }

func (m *model) startClaim(w world, o owner, to become) {
	if int(w.claims) >= m.Claims {
		return
	}
	newest := w.newest()
	h := m.entry(newest).head
	rec := m.after(newest, entry{kind: claim, by: w.claims + 1, head: head{epoch: h.epoch + 1, kept: h.kept}})
	if rec == 0 {
		return
	}
	w.claims++
	o.pc, o.by, o.epoch, o.app = claiming, w.claims, uint16(h.epoch)+1, appender{put, rec}
	to(w, o, "reads the head and claims")
}

func (m *model) afterClaim(o owner, a appender, res outcome) owner {
	switch res {
	case going:
		o.app = a
		return o
	case committed:
		o.known = a.rec
		return o.withoutAttempt()
	}
	return o.stopped() // starts over
}

// startAttempt uploads what is new, with or without borrowing from one retained checkpoint.
func (m *model) startAttempt(w world, o owner, to become) {
	if int(w.atts) >= m.Attempts {
		return
	}
	w.atts++
	w.epochOf[w.atts-1] = uint8(o.epoch)
	w.fresh |= one(w.atts)
	o.pc, o.att = uploaded, w.atts
	to(w, o, "uploads")
	for _, p := range m.entry(o.known).head.kept {
		p.blobs().each(func(att uint8) {
			o.base, o.refs = p.att, one(att)
			to(w, o, "uploads, borrowing")
		})
	}
}

// seal makes the blobs permanent and builds the commit. An absent blob fails the attempt.
func (m *model) seal(w world, o owner, to become) {
	if m.broken != PublishFirst {
		if !w.blobs().has(o.att) {
			to(w, o.withoutAttempt(), "seals: blob is gone")
			return
		}
		w.sealed |= one(o.att)
		w.fresh &^= one(o.att)
	}
	to(w, m.buildCommit(o, true), "seals")
}

// buildCommit is the decision of P5e on the head the owner knows.
func (m *model) buildCommit(o owner, checkBase bool) owner {
	h := m.entry(o.known).head
	base, ok := h.retained(o.base)
	ok = ok && o.refs&^base.blobs() == 0
	if h.void.has(o.att) || checkBase && o.base != 0 && !ok {
		return o.withoutAttempt()
	}

	h.kept = [2]point{h.kept[1], {att: o.att, refs: o.refs}}
	h.done = o.att
	rec := m.after(o.known, entry{kind: commit, by: o.by, att: o.att, head: h})
	if rec == 0 {
		return o.withoutAttempt()
	}
	o.pc, o.app = publish, appender{put, rec}
	return o
}

// giveUp is what an owner may do while no entry with the attempt is on its way (decision
// 0001). That its slot holds another's entry is not enough: the commit may have been
// there, superseded and removed. So it reads the head first.
func (m *model) giveUp(w world, o owner, to become) {
	h := m.entry(w.newest()).head
	_, named := h.retained(o.att)
	if m.broken != TrustLostSlot && (h.epoch != uint8(o.epoch) || named || h.done == o.att) {
		return
	}
	w.remove(one(o.att))
	to(w, o.withoutAttempt(), "gives an upload up and deletes it")
}

// abort is what P3.5 forbids.
func (m *model) abort(w world, o owner, to become) {
	if w.ghost == o.app.rec {
		w.remove(one(o.att))
		to(w, o.withoutAttempt(), "takes the timed-out commit for failed and deletes")
	}
}

func (m *model) afterCommit(w world, o owner, a appender, res outcome) owner {
	o.app = a
	switch res {
	case lost:
		o.pc, o.app = reread, appender{}
	case fenced:
		return o.stopped()
	case committed:
		o.known = a.rec
		o.dels |= w.dead(m.entry(a.rec).head)
		if m.broken == PublishFirst {
			o.pc, o.app = lateSeal, appender{}
			return o
		}
		return o.withoutAttempt()
	}
	return o
}

// rereadHead is P3.3 after a lost race: the head decides, not what lies at the slot.
func (m *model) rereadHead(w world, o owner, to become) {
	newest := w.newest()
	if m.entry(newest).head.epoch != uint8(o.epoch) {
		to(w, o.stopped(), "reads the head: fenced")
		return
	}
	o.known = newest
	to(w, m.buildCommit(o, m.broken != BaseNotRechecked), "reads the head and decides again")
}

// agentSteps makes the steps of a sweeper or pruner; start looks at the head and decides.
func (m *model) agentSteps(w world, of func(*world) *agent, name string, start func(w world, a agent, to func(w world, a agent, act string)), out emit) {
	a := *of(&w)
	to := func(w world, a agent, act string) {
		*of(&w) = a
		out(w, Event{name, act})
	}
	deleteSteps(w, a.dels, func(w world, left set) {
		to(w, agent{app: a.app, pc: a.pc, dels: left}, "deletes a dead blob")
	})

	if a.pc == off {
		if w.newest() != 0 {
			start(w, a, to)
		}
		return
	}
	m.appendSteps(w, a.app, func(w world, app appender, res outcome, act string) {
		a := agent{app: app, pc: sending, dels: a.dels}
		if res != going {
			a.app, a.pc = appender{}, off
		}
		if res == committed {
			a.dels |= w.dead(m.entry(app.rec).head)
		}
		to(w, a, act)
	})
}

// sweep is P9: it finds dead blobs, or voids an attempt of the current epoch.
func (m *model) sweep(w world, a agent, to func(w world, a agent, act string)) {
	newest := w.newest()
	h := m.entry(newest).head
	dead := w.dead(h)
	if m.broken == SweepByAge {
		dead = w.blobs() &^ h.named()
	}
	if dead&^a.dels != 0 {
		n := a
		n.dels |= dead
		to(w, n, "finds dead blobs")
	}

	(w.blobs() &^ h.named() &^ dead).each(func(att uint8) {
		h := h
		h.void |= one(att)
		if rec := m.after(newest, entry{kind: void, att: att, head: h}); rec != 0 {
			to(w, agent{appender{put, rec}, sending, a.dels}, "voids an attempt")
		}
	})
}

// prune is P12: it drops the older of two checkpoints.
func (m *model) prune(w world, a agent, to func(w world, a agent, act string)) {
	newest := w.newest()
	h := m.entry(newest).head
	if h.kept[0].att == 0 {
		return
	}
	h.kept[0] = point{}
	if rec := m.after(newest, entry{kind: trim, head: h}); rec != 0 {
		to(w, agent{appender{put, rec}, sending, a.dels}, "drops a checkpoint")
	}
}

// restorerSteps finds the head as P2 does, in single requests, and reads the blobs of a
// retained checkpoint in any order.
func (m *model) restorerSteps(w world, out emit) {
	r := w.reader
	to := func(r restorer, act string) {
		n := w
		n.reader = r
		out(n, Event{"restorer", act})
	}

	switch r.pc {
	case off:
		if newest := m.entry(w.newest()); newest.slot > 0 {
			to(restorer{pc: listed, slot: newest.slot}, "lists")
		}
	case listed:
		m.readForward(w, r, to)
	case reading:
		r.want.each(func(att uint8) {
			n := restorer{pc: reading, att: r.att, want: r.want &^ one(att)}
			switch {
			case !w.blobs().has(att):
				to(restorer{pc: missed, att: r.att}, "misses a blob")
			case n.want == 0:
				to(restorer{pc: finished}, "reads the last blob")
			default:
				to(n, "reads a blob")
			}
		})
	case missed:
		if _, ok := m.entry(w.newest()).head.retained(r.att); ok || m.broken == NoReread {
			m.bad = "a restorer misses a blob of a retained checkpoint"
		}
		to(restorer{pc: finished}, "reads the head again")
	}
}

func (m *model) readForward(w world, r restorer, to func(r restorer, act string)) {
	if w.at(r.slot+1) != 0 {
		to(restorer{pc: listed, slot: r.slot + 1}, "reads forward")
		return
	}
	there := w.at(r.slot)
	if there == 0 {
		to(restorer{}, "finds nothing and lists again")
		return
	}
	for _, p := range m.entry(there).head.kept {
		if p.att != 0 {
			to(restorer{pc: reading, att: p.att, want: p.blobs()}, "takes a checkpoint")
		}
	}
}
