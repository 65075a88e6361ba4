// What a text is worth: the grammar, the raters and the reward model of instruct_goose.tasks.film_reviews and the guide *The playground*.
import { END } from "./policy.js"

export class Judge {
  constructor({ words, templates, slots, ratings, reward }) {
    Object.assign(this, { words, ratings, reward })
    this.pattern = grammar(templates, slots)
  }

  // ids as text, without <end>: `decode`
  text(ids) { return ids.filter(id => id !== END).map(id => this.words[id]).join(" ") }

  // the mean human rating of the rated words, 0 without one: `human_score`
  humanScore(text) {
    const rated = text.split(" ").filter(word => word in this.ratings)
    return rated.length ? rated.reduce((a, word) => a + this.ratings[word], 0) / rated.length : 0
  }

  // is the whole text one of the templates, with the right article before each word, and ended? `grammatical`
  grammatical(text, ended) { return ended && this.pattern.test(text) }

  // r(x) = b + Σ_w u_w·n_w(x): `WordCountReward`
  score(ids) { return ids.reduce((sum, id) => sum + (id === END ? 0 : this.reward.weights[id]), 0) + this.reward.bias }
}

// all templates as one regular expression: `_grammar`
function grammar(templates, slots) {
  const either = words => `(?:${words.join("|")})`
  const slot = (_, withArticle, opposite, name) => {
    const words = slots.flatMap(kind => kind[name] ?? []), an = w => /^([aeio]|un|ug|hono|hones)/.test(w)
    return withArticle ? `(?:an ${either(words.filter(an))}|a ${either(words.filter(w => !an(w)))})` : either(words)
  }
  return new RegExp(`^(?:${templates.map(t => t.replace(".", "\\.").replace(/\{(a )?(-)?(\w+)\}/g, slot)).join("|")})$`)
}

// different pairs of neighbouring words over all such pairs: `distinct_2`
export function distinct2(texts) {
  const pairs = texts.flatMap(text => {
    const words = text.split(" ")
    return words.slice(1).map((word, i) => `${words[i]} ${word}`)
  })
  return pairs.length ? new Set(pairs).size / pairs.length : 0
}
