package tasklog

// cache holds the heads of tasks in two generations: what was not used while one filled up
// is forgotten with the older one.
type cache struct {
	limit int // of one generation
	young map[string]*log
	old   map[string]*log
}

// log is what Apply knows of a task.
type log struct {
	key  []byte // job/task
	head head
	// fresh are the records written since the last commit, which the database does not
	// show yet.
	fresh   []record
	touched bool // in the list of those that the running Apply has changed
}

// get returns what is known of a task, nil if nothing is.
func (c *cache) get(key []byte) *log {
	if l := c.young[string(key)]; l != nil {
		return l
	}
	l := c.old[string(key)]
	if l != nil {
		c.put(l)
	}
	return l
}

func (c *cache) put(l *log) {
	if c.young == nil {
		c.young = map[string]*log{}
	}
	c.young[string(l.key)] = l
}

// age begins a new generation when one is full. Nothing that is not in the database may
// be in the cache then.
func (c *cache) age() {
	if len(c.young) >= c.limit {
		c.old, c.young = c.young, nil
	}
}

func (c *cache) clear() { c.old, c.young = nil, nil }
