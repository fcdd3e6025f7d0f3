// Asks again every so often while a view is open and the tab is seen; says so when it fails.

export class Poll {
  constructor(everyMs, look, trouble) {
    this.everyMs = everyMs;
    this.look = look;
    this.trouble = trouble;
    this.closed = false;
    this.turn();
  }

  async turn() {
    if (this.closed) return;
    if (!document.hidden) await this.once();
    if (!this.closed) this.timer = setTimeout(() => this.turn(), this.everyMs);
  }

  async once() {
    try {
      await this.look();
      this.trouble.hidden = true;
    } catch (error) {
      this.trouble.textContent = `What is shown may be old: ${error.status ? error.message : "no answer from the service"}`;
      this.trouble.hidden = false;
    }
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
  }
}
